"""`minisgl bench`: measurements, by the public names only."""
