"""What studies decisions in virtual time."""
