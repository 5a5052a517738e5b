"""The objectives against vectors: small JSON files of inputs and right results that any project can read."""
