"""What a model costs on a device, and which segments form which stage."""
