"""The Text-to-SQL steps, in the manner of CHESS (arXiv 2405.16755): link, draft, correct, judge."""
