"""A virtual network and builders, for our tests and for those of our users."""
