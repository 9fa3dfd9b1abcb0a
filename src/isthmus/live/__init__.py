"""What carries decisions out on real machines."""
