"""What a person sees of a job: metric files, live view, end report, time use."""
