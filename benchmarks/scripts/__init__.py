"""Scripts of several frameworks that train the same model, each as its users would write it."""
