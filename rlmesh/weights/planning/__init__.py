"""The plan of a weight sync: buckets, routes, locations, and the states of source and sinks."""
