"""Small targets and scripted drafters that the tests share."""
