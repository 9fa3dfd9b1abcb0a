"""Load generators and the small random models they run on."""
