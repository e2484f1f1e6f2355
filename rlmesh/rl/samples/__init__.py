"""The samples of a run: written as Parquet files in the run directory, and read, searched and shown later."""
