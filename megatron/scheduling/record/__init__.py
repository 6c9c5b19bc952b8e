"""Write what a run did to the report's folder; measure stages."""
