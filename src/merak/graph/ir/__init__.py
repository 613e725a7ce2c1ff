"""The graph's data types: tensors, segments, models; mutation of values; serialisation."""
