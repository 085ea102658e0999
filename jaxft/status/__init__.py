"""What a person sees: the event log, and the live view that reads it."""
