"""Python state that a trace takes as constants: recorded, compared, and made inputs of the graph.

A trace runs the model's Python code once. What that code reads from attributes, globals and
closures would be fixed for ever, while a training script may well change it between two steps.
"""
