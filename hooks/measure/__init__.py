"""What iterations take, measured on the streams and kept; what streaming costs and gives, reported."""
