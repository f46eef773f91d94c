"""Read recipes: closed schemas that name every fault at once.

Nothing below the pipeline knows of recipes: stages take plain values.
"""

from msa_lite.recipe.demo import Demo as Demo
from msa_lite.recipe.editor import recipe_schema as recipe_schema
from msa_lite.recipe.editor import write_with_schema as write_with_schema
from msa_lite.recipe.inputs import Columns as Columns
from msa_lite.recipe.inputs import Data as Data
from msa_lite.recipe.inputs import Prompt as Prompt
from msa_lite.recipe.load import RecipeSource as RecipeSource
from msa_lite.recipe.load import TableSource as TableSource
from msa_lite.recipe.load import absolute_paths as absolute_paths
from msa_lite.recipe.load import copy_recipe as copy_recipe
from msa_lite.recipe.load import dump_recipe as dump_recipe
from msa_lite.recipe.load import given_paths as given_paths
from msa_lite.recipe.load import load_any as load_any
from msa_lite.recipe.load import load_recipe as load_recipe
from msa_lite.recipe.load import load_table_recipe as load_table_recipe
from msa_lite.recipe.load import load_training as load_training
from msa_lite.recipe.load import moved_paths as moved_paths
from msa_lite.recipe.load import relative_paths as relative_paths
from msa_lite.recipe.load import set_key as set_key
from msa_lite.recipe.schema import Recipe as Recipe
from msa_lite.recipe.scores import SETS as SETS
from msa_lite.recipe.scores import JudgeKeys as JudgeKeys
from msa_lite.recipe.shipped import check_new_file as check_new_file
from msa_lite.recipe.shipped import find_recipe as find_recipe
from msa_lite.recipe.shipped import shipped_recipes as shipped_recipes
from msa_lite.recipe.shipped import shipped_tables as shipped_tables
from msa_lite.recipe.shipped import title_of as title_of
from msa_lite.recipe.table import TableRecipe as TableRecipe
from msa_lite.recipe.table import overrides_of as overrides_of
from msa_lite.recipe.training import TrainingRecipe as TrainingRecipe
