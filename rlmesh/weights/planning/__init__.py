"""The plan of a weight sync: buckets, element types, locations, and the states of both ends."""
