"""What shows that the library is right: predictions beside measurements, figures, readers given damaged files."""
