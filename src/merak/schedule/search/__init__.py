"""Schedules by search: candidates made from measured stage times, compared by simulation."""
