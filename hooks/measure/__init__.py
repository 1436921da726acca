"""Times of iterations, measured on the streams and kept, and the report of what streaming costs and gives.

The face: `Pace`, `Measured` and `point_of` (pace.py), `Timings`, `Latencies` and `RequestTimes` (timings.py), `Report`
(report.py).
"""
