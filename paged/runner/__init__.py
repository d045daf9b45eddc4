"""Executing plans on a device: the cache, the state of the batch, the sampler."""
