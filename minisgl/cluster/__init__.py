"""Workers of a fleet, KV-aware routing, the prefill/decode split (second part of the book, chapters 6 to 10)."""
