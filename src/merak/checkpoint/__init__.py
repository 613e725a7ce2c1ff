"""Weights: created or read part by part, written whole, saved to resume in any layout."""
