"""What may be said about runs: intervals, verdicts, costs of a quality, speed-ups. Pure functions
of numbers; nothing here reads a file or knows a method's name."""
