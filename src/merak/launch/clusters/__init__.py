"""Jobs for the launchers of clusters: texts and manifests that start the same script."""
