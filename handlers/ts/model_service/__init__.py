"""Forms of handlers from before TorchServe."""
