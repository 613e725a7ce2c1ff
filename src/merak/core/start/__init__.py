"""The start of a job: degrees and device checked, ranks connected, the mesh laid out."""
