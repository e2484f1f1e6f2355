"""The callee's side of calls: dispatch, execution, results, and reports of what a member does."""
