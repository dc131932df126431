"""Settings for each method, chosen by equally many trials on data that are not the test set."""
