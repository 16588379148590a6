"""What tests of state need: contract suites, a clock set by hand, a store that fails on demand."""
