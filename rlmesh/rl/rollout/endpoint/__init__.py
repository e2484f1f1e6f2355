"""An endpoint with OpenAI's interface on an engine of the job, which records the token ids of each episode."""
