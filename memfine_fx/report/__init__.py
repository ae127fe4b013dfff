"""Records as text, JSON, pictures and logs."""
