"""The rehearsal of one rank of a large job on one device, without its other ranks."""
