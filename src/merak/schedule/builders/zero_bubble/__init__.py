"""Builders of schedules with split backwards, whose weight gradients fill idle moments."""
