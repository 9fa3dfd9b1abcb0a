"""One file per verb. Anything may be imported here, and nothing imports it."""
