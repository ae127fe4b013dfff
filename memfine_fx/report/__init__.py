"""Report: records as text, JSON, pictures, scalars and logs.

In: what a session knows of its regions, heads and steps. Out: what a person or a log reads: `reports.Report` and its
text and JSON, pages (`page`) with charts (`chart`, `figure`) in one style, a region as SVG (`roles`, `picture`).
One idea: a report is a value. It is made once from what is known now, and every other form is computed from it; so
showing something changes nothing.
It decides and measures nothing, and knows neither the compiler nor the api.
"""
