"""Parts of `transformers_tests.py`: what runs inside of pytest, and the models it needs."""
