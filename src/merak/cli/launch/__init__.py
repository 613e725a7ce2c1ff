"""`merak launch`: jobs on clusters."""
