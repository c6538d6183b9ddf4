"""What ranks that hold parts of one model do together."""
