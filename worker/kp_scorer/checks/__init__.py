"""What operators have looked for in traces beside the score. Light: the process of the checks imports it."""
