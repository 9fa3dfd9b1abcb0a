"""JSON schemas: what they constrain, and the grammar of the JSON that fits. Knows nothing of requests."""
