"""Files beside a model's: who may read and write them, and JSON that somebody may have changed."""
