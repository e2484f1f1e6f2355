"""The samples of a run: written as Parquet files in its directory, and read, searched and shown from there."""
