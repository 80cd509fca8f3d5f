"""What prepares inputs outside of Python."""
