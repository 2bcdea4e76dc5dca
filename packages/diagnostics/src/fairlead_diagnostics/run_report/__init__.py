"""`fairlead report`: one page about one run or several."""
