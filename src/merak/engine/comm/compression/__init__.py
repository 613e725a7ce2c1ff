"""Compressed gradient reductions: what replicas send of a bucket, and what they owe."""
