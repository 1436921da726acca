"""Times of iterations, measured on the streams and kept, and the report of what streaming costs and gives."""
