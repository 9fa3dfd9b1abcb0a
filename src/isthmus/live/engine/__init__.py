"""Runs a model on torch: weights, paged KV, attention as a sum of parts, sampling. torch lives only here."""
