"""One call of the model as it is traced, and the further ones that it is compared with."""
