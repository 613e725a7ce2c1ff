"""Pictures of a simulated schedule: text, SVG and HTML."""
