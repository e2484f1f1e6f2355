"""The persisted state of a job, from which a restarted master continues."""
