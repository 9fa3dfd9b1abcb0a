"""KV in bytes: loads, saves, fetches, hand-overs, and what lies with holders."""
