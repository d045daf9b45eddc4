"""What can be chosen: the YAML files that Hydra composes."""
